"""Fine-tunes a pretrained recurrent language model on other text: all parameters, or only the last layer.

    python examples/finetune_pretrained.py [FOLDER]

FOLDER has config.json and safetensors, as `save_pretrained` of transformers writes them, and its tokens are bytes.
Without it a small mamba2 is made and trained on sums in words first, so that the program needs no download. Then the
model learns the same sums in digits, first with the last layer alone and then with all parameters, and is saved for
transformers.

Shapes: N texts, T tokens, V vocabulary.
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrnn

LENGTH = 32  # T
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
CONFIG = {
    "model_type": "mamba2", "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 16,
    "num_heads": 4, "head_dim": 16, "n_groups": 1,
}  # fmt: skip


def texts(rng, count, in_words):
    """Sums as bytes, int32 [count, T]: "two plus three is five." or "2+3=5.", filled up with spaces."""
    rows = np.full((count, LENGTH), ord(" "), np.int32)
    for row in rows:
        a = rng.integers(0, 6)
        b = rng.integers(0, 5)
        text = f"{WORDS[a]} plus {WORDS[b]} is {WORDS[a + b]}." if in_words else f"{a}+{b}={a + b}."
        row[: len(text)] = list(text.encode())
    return rows


def loss(model, tokens):
    """The mean of -log p(next token)."""
    logits, _ = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


OPTIMIZER = optax.adam(1e-2)


@jax.jit
def step(model, state, tokens, share):
    """One step of Adam. `share` is a tree like the model: 1 for parameters that are trained, and 0 for the others."""
    value, gradients = jax.value_and_grad(loss)(model, tokens)
    updates, state = OPTIMIZER.update(gradients, state)
    return optax.apply_updates(model, jax.tree.map(jnp.multiply, updates, share)), state, value


def train(model, in_words, steps, is_trained=lambda name: True, batch=16, seed=0):
    """Returns the model after `steps` of Adam, and its losses; parameters that `is_trained` refuses stay as they are."""
    share = jax.tree.map_with_path(
        lambda path, _: float(is_trained(jax.tree_util.keystr(path))), model
    )
    rng, state, losses = np.random.default_rng(seed), OPTIMIZER.init(model), []
    for _ in range(steps):
        model, state, value = step(model, state, texts(rng, batch, in_words), share)
        losses.append(float(value))
    return model, losses


def write(model, prompt, length):
    """Returns the prompt and the likeliest bytes after it."""
    tokens = jnp.asarray([list(prompt.encode())])
    new, _ = model.generate(tokens, length, temperature=0)
    return prompt + bytes(np.asarray(new[0]).tolist()).decode(errors="replace")


def main(folder=None, steps=75):
    """Returns the losses before, with the last layer alone, and with all parameters; and what the model writes."""
    if folder is None:
        folder = tempfile.mkdtemp()
        model, losses = train(jrnn.models.create(CONFIG, jax.random.key(0)), True, 2 * steps)
        print(f"pretraining, sums in words: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        model.save(folder)

    pretrained = jrnn.models.load(folder)
    last = f"layers.{pretrained.config.num_hidden_layers - 1}."
    only_last, first = train(pretrained, False, steps, lambda name: last in name)
    every, second = train(only_last, False, steps, seed=1)
    means = [
        first[0],
        np.mean(first[-10:]),
        np.mean(second[-10:]),
    ]  # each before the step on its texts
    for what, value in zip(("before", "last layer", "all parameters"), means):
        print(f"sums in digits, {what}: loss {value:.3f}")
    written = write(every, "2+3=", 2)
    print(f"it writes: {written}")
    every.save(tempfile.mkdtemp())  # transformers and jrnn.models.load read it
    return means, written


if __name__ == "__main__":
    main(*sys.argv[1:2])
