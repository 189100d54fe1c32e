"""A language model of transformers' `Glm5NextTextModel`, which has none without images, and its registration.

Import it, and `AutoModelForCausalLM` makes, reads and writes models of the type glm5_next_text.
"""

from typing import ClassVar

import torch
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next import configuration_glm5_next, modeling_glm5_next


class Glm5NextTextForCausalLM(modeling_glm5_next.Glm5NextPreTrainedModel, GenerationMixin):
    """As `Glm5NextForConditionalGeneration`, for texts alone."""

    config: configuration_glm5_next.Glm5NextTextConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = modeling_glm5_next.Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, labels=None,
        logits_to_keep=0, **options,
    ):  # fmt: skip
        given = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
        }
        out = self.model(input_ids=input_ids, use_cache=use_cache, **given, **options)
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        loss = None if labels is None else ForCausalLMLoss(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=out.past_key_values)


AutoModelForCausalLM.register(
    configuration_glm5_next.Glm5NextTextConfig, Glm5NextTextForCausalLM, exist_ok=True
)
