"""Medusa decoding for Llama-family models in JAX: several tokens per forward pass, losslessly.

>>> import medusa_jax
>>> lm = medusa_jax.MedusaLM.load()
>>> lm.generate(["What is a leap year?"], medusa_jax.SamplingParams(max_new_tokens=64))  # doctest: +SKIP
"""

from medusa_jax.errors import UserError
from medusa_jax.generate import Completion, MedusaLM, Stats
from medusa_jax.sampling import SamplingParams

__all__ = ["Completion", "MedusaLM", "SamplingParams", "Stats", "UserError"]
__version__ = "0.1.0"
