"""What of a training run is checked by `jrnn check CONFIG`: the loss of its first batch."""

import pytest

from jrnn.gradcheck import Effort, check
from jrnn.train import load_config
from jrnn.train.check import subject_of_config


@pytest.mark.parametrize("kind, exact", [("cells", True), ("nn", False)])
def test_a_model_is_checked_as_a_net_or_as_a_function(kind, exact, tmp_path, x64):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ran away\n" * 20)
    (tmp_path / "c.toml").write_text(
        f'[data]\npath = "{tmp_path}/text.txt"\nbatch = 1\nchunk = 2\n[model]\nkind = "{kind}"\nembedding = 1\nhidden = 1\n'
    )
    s = subject_of_config(load_config(tmp_path / "c.toml"))
    assert s.exact is exact and "embedding" in s.wrt and s.rows == 1
    report = check(s, Effort(1e-10 if exact else 1e-6, max_elements=2))
    assert report.agrees and report.loss == pytest.approx(3, abs=0.5)  # nats of one of 20 characters
