"""Medusa decoding for Llama-family models in JAX: several tokens per forward pass, losslessly.

>>> import medusa_jax
>>> lm = medusa_jax.MedusaLM.load()
>>> lm.generate(["What is a leap year?"], medusa_jax.SamplingParams(max_new_tokens=64))  # doctest: +SKIP
"""

import os

# transformers is here for its tokenizers; that it finds no torch is no news for anybody.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from medusa_jax.completion import Completion, Stats
from medusa_jax.errors import UserError
from medusa_jax.generate import MedusaLM, enable_compilation_cache
from medusa_jax.sampling import SamplingParams
from medusa_jax.tree import Tree

__all__ = [
    "Completion",
    "MedusaLM",
    "SamplingParams",
    "Stats",
    "Tree",
    "UserError",
    "enable_compilation_cache",
]
__version__ = "0.1.0"
