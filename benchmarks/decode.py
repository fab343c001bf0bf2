"""Decoding beside CTranslate2 and llama.cpp: tokens/s of the same dimensions in fp32 on this machine's CPU, in turns.

    pip install ctranslate2
    python benchmarks/decode.py smollm2-135m --batch 1,8
    pip install ik-llama-cpp-python  # a build of llama.cpp's fork for Python; it decodes one request at a time
    python benchmarks/decode.py smollm2-135m --batch 1 --gguf smollm2-135m-f32.gguf

Weights are drawn: what is measured does not depend on their values; llama.cpp reads its own from an F32 file of the
same model. Each round times all, so that other load on the machine meets all alike; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerDecoderModelSpec, common_spec

from meshwise.engine.engine import Engine
from meshwise.engine.launch import Asked, Limits, compile_cache, launch
from meshwise.engine.requests import Collected, EngineRequest
from meshwise.models import Model, load_model
from meshwise.sharding.serving import ServingLayout

PROMPT, OUTPUT = 16, 48


def peer(model: Model, folder: Path) -> ctranslate2.Generator:
    """A decoder of the model's dimensions for CTranslate2, with drawn weights."""
    sizes = model.train_program().sizes
    d, f, heads, kv, width = (int(sizes[a]) for a in ("D", "F", "N", "K", "H"))
    vocabulary = int(sizes["V"])
    spec = TransformerDecoderModelSpec.from_config(
        model.num_layers, heads, activation=common_spec.Activation.SWISH, pre_norm=True, ffn_glu=True, rms_norm=True,
        rotary_dim=0, rotary_interleave=False, num_heads_kv=kv,
    )  # fmt: skip
    draw = np.random.default_rng(0)

    def weight(rows: int, columns: int) -> Any:
        return (draw.standard_normal((rows, columns), np.float32) / columns**0.5).astype(np.float32)

    decoder = spec.decoder
    decoder.embeddings.weight = weight(vocabulary, d)
    decoder.scale_embeddings = False
    decoder.layer_norm.gamma = np.ones(d, np.float32)
    decoder.projection.weight = weight(vocabulary, d)
    for layer in decoder.layer:
        attention, mlp = layer.self_attention, layer.ffn
        for norm in (attention.layer_norm, mlp.layer_norm):
            norm.gamma = np.ones(d, np.float32)
        attention.linear[0].weight = weight((heads + 2 * kv) * width, d)
        attention.linear[1].weight = weight(d, heads * width)
        mlp.linear_0.weight, mlp.linear_0_noact.weight = weight(f, d), weight(f, d)
        mlp.linear_1.weight = weight(d, f)
    names = [f"w{n}" for n in range(vocabulary)]
    spec.register_vocabulary(names)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = names[0], names[1], names[2]
    spec.validate()
    spec.save(str(folder))
    return ctranslate2.Generator(str(folder), device="cpu", compute_type="float32", intra_threads=2)


def peer_seconds(generator: ctranslate2.Generator, batch: int) -> float:
    """Seconds of OUTPUT - 1 steps after the first, of `batch` requests."""
    prompts = [[f"w{3 + n}" for n in range(PROMPT)]] * batch

    def timed(count: int) -> float:
        begun = time.perf_counter()
        done = generator.generate_batch(
            prompts, max_length=count, min_length=count, sampling_topk=1, include_prompt_in_result=False
        )
        assert all(len(one.sequences[0]) == count for one in done)
        return time.perf_counter() - begun

    return timed(OUTPUT) - timed(1)


def llama_seconds(llama: Any, batch: int) -> float:
    """The same of llama.cpp, for one request."""
    assert batch == 1, "--gguf: give --batch 1"

    def timed(count: int) -> float:
        begun = time.perf_counter()
        assert len(llama.generate(list(range(3, 3 + PROMPT)), max_tokens=count)) == count
        return time.perf_counter() - begun

    return timed(OUTPUT) - timed(1)


def own_seconds(engine: Engine, batch: int) -> float:
    """The same of our engine: its steps that decode all requests."""
    for k in range(batch):
        engine.submit(EngineRequest(list(range(3 + k, 3 + k + PROMPT)), OUTPUT, Collected()))
    engine.step()
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    begun = time.perf_counter()
    while engine.step():
        pass
    return time.perf_counter() - begun


def main() -> None:
    """Print a line a batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf", help="an F32 file of the model, for llama.cpp")
    given = parser.parse_args()
    model, batches = load_model(given.model), [int(word) for word in given.batch.split(",")]
    compile_cache(None)
    limits = Limits(max_batch=max(batches), max_len=128, max_step_tokens=PROMPT * max(batches), prefix_cache=False)
    made = launch(model, Asked(ServingLayout(), 1, limits), weights=None, seed=0, dtype=None, cpu_devices=None,
                  progress=lambda _: None, say=lambda _: None)  # fmt: skip
    engine = Engine(made.scheduling, made.blocks, made.executor)
    with tempfile.TemporaryDirectory() as folder:
        peers: dict[str, Callable[[int], float]] = {"CTranslate2": partial(peer_seconds, peer(model, Path(folder)))}
        if given.gguf is not None:
            from ik_llama_cpp import IkLlama  # noqa: PLC0415 -- only where it is asked for

            peers["llama.cpp"] = partial(llama_seconds, IkLlama(given.gguf, n_ctx=512, n_threads=2))
        for batch in batches:
            timed: list[Callable[[int], float]] = [partial(own_seconds, engine), *peers.values()]
            rounds = [[seconds(batch) for seconds in timed] for _ in range(given.rounds + 1)][1:]  # after a warm-up
            tokens = batch * (OUTPUT - 1)
            rates = [tokens / statistics.median(column) for column in zip(*rounds, strict=True)]
            print(f"{model.name}, batch {batch}: {rates[0]:.1f} tokens/s")
            for place, name in enumerate(peers, 1):
                ratio = statistics.median(one[place] / one[0] for one in rounds)
                print(f"  {name}: {rates[place]:.1f}; ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
