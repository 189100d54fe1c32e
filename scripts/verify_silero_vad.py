"""Runs silero-vad by jrnn and by onnxruntime, chunk by chunk with the state carried, and prints the largest difference.

    python scripts/verify_silero_vad.py silero_vad_16k_op15.onnx test.wav

Both files are in the repository snakers4/silero-vad (MIT), under src/silero_vad/data and tests/data; the sound is 16-bit
mono at 16 kHz. Without one, noise of changing loudness is used. The model takes 512 new samples and the 64 before them.
"""

import sys
import time
import wave

import jax
import numpy as np
import onnxruntime

import jrnn

CHUNK, CONTEXT, CHUNKS = 512, 64, 1000


def sound(path=None):
    if path is None:
        loudness = 0.3 * (1 + np.sin(np.arange(CHUNKS * CHUNK) / 15000))
        return (np.random.default_rng(0).standard_normal(CHUNKS * CHUNK) * loudness).astype(
            np.float32
        )
    with wave.open(path) as file:
        return np.frombuffer(file.readframes(CHUNKS * CHUNK), np.int16).astype(np.float32) / 32768


def main(model_path, wave_path=None):
    samples = np.concatenate([np.zeros(CONTEXT, np.float32), sound(wave_path)])
    model = jrnn.from_onnx(model_path)
    rate = np.asarray(
        16000, np.int64
    )  # a numpy array: known while tracing, so that the branch is chosen then
    step = jax.jit(lambda x, state: model({"input": x, "state": state, "sr": rate}))
    session = onnxruntime.InferenceSession(model_path)
    ours = theirs = np.zeros((2, 1, 128), np.float32)
    worst = {"output": 0.0, "stateN": 0.0}
    seconds, probabilities = [], []
    for k in range(CHUNKS):
        x = samples[None, k * CHUNK : (k + 1) * CHUNK + CONTEXT]
        begin = time.perf_counter()
        outputs = step(x, ours)
        ours = jax.block_until_ready(outputs["stateN"])
        seconds.append(time.perf_counter() - begin)
        expected = dict(
            zip(
                ("output", "stateN"),
                session.run(None, {"input": x, "state": theirs, "sr": rate}),
                strict=True,
            )
        )
        theirs = expected["stateN"]
        probabilities.append(expected["output"].item())
        for name, value in expected.items():
            scale = max(1.0, np.abs(value).max())
            worst[name] = max(
                worst[name], float(np.abs(np.asarray(outputs[name]) - value).max() / scale)
            )
    print(f"{CHUNKS} chunks, speech in {np.mean(np.asarray(probabilities) > 0.5):.0%} of them")
    print(
        f"largest difference: probability {worst['output']:.1e}, state {worst['stateN']:.1e} (relative above 1)"
    )
    print(f"jrnn: {np.median(seconds) * 1e6:.0f} microseconds a chunk")
    assert max(worst.values()) < 1e-4


if __name__ == "__main__":
    main(*sys.argv[1:])
