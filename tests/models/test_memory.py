"""The peak of what making weights takes from the operating system: leaf by leaf, and for comparison all at once.

Quicker tests of the same are in the files of what is measured.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from ccjax.models.llama3 import LlamaConfig, abstract_params
from ccjax.models.llama3.convert import save_pretrained
from ccjax.models.llama3.presets import preset
from tests.conftest import ROOT
from tests.models.test_convert import write
from tests.oracles import random_llama

# RssAnon is what is read: it leaves out pages of files that are mapped.
PROGRAM = """
import gc, sys, threading
import jax, jax.numpy as jnp, numpy as np
from safetensors.numpy import load_file
import ccjax.models.llama3.params as params_module
from ccjax.models.llama3 import init_params
from ccjax.models.llama3.convert import load_params
from ccjax.models.llama3.presets import preset
from ccjax.models.llama3.quantized import quantize
params_module._DRAWN_AT_ONCE = 1 << 20

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

jnp.asarray(np.ones((64, 64), np.float32)).block_until_ready()

def by_leaf(directory):
{by_leaf}

def at_once(directory):
{at_once}

def measured(run):
    gc.collect()
    start, highest, done = anonymous_bytes(), [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            highest.append(max(highest.pop(), anonymous_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    jax.block_until_ready(run(sys.argv[1]))
    done.set()
    watcher.join()
    return highest[0] - start

print(*map(measured, (by_leaf, at_once)))
"""


def num_bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def drawn(config: LlamaConfig):
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.random(leaf.shape, np.float32), abstract_params(config))


def half_precision(directory: Path) -> int:
    shape = dict(hidden_size=1024, num_hidden_layers=5, intermediate_size=2816, head_dim=128)
    weights, config = random_llama(8, vocab_size=1024, **shape)
    write(directory, {name: w.astype(np.float16) for name, w in weights.items()}, config)
    # Measured 266 to 270 MB, 289 on a busy machine, which frees temporary tensors later; 383 when read all at once.
    return sum(w.nbytes for w in weights.values()) + 5 * 4 * max(w.size for w in weights.values()) + 20_000_000


def full_precision(directory: Path) -> int:
    """The largest tensor as read, its values in both layouts, and blocks, besides the result."""
    config = preset("6x1024", 2048)
    save_pretrained(drawn(config), config, directory)
    return num_bytes(abstract_params(config, quantization="int8")) + 2 * 4 * 2816 * 1024 + 3 * (8 << 20) + 20_000_000


def nothing(directory: Path) -> int:
    return num_bytes(abstract_params(preset("2x1024", 24576), "bfloat16")) + 20 * (1 << 20) + 40_000_000


CASES = {
    "loading in another dtype": (
        half_precision,
        "return load_params(directory, dtype=jnp.float32)",
        """
        whole = load_file(directory + "/model.safetensors")
        return load_params(directory, dtype=jnp.float32), list(whole)
        """,
    ),
    "loading in 8 bits": (
        full_precision,
        'return load_params(directory, dtype=jnp.float32, quantization="int8")',
        """
        plain = load_params(directory, dtype=jnp.float32)
        quick = jax.jit(quantize, static_argnums=(1, 2))
        return [quick(jnp.asarray(layer.w_up), (0,), "int8") for layer in plain.layers]
        """,
    ),
    "drawing": (
        nothing,
        'return init_params(preset("2x1024", 24576), jax.random.key(0), jnp.bfloat16)',
        """
        wide = init_params(preset("2x1024", 24576), jax.random.key(0))
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide)
        """,
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from Linux's /proc")
@pytest.mark.parametrize("case", CASES)
def test_making_weights_never_holds_the_model_twice(tmp_path, case):
    prepare, *ways = CASES[case]
    allowed = prepare(tmp_path)
    by_leaf, at_once = (textwrap.indent(textwrap.dedent(way), "    ") for way in ways)
    program = PROGRAM.format(by_leaf=by_leaf, at_once=at_once)
    # So that glibc gives freed tensors back at once; else up to 70 MB of them stay in its heap.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    # There is much to compute and little to compile, other than in most tests.
    environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "").replace("optimization_level=0", "optimization_level=2")
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    measured, whole = map(int, done.stdout.splitlines()[-1].split())
    print(f"{measured / 1e6:.0f} and {whole / 1e6:.0f} MB, allowed {allowed / 1e6:.0f} MB")
    assert measured < allowed < whole
