"""Eight CPU devices for the sharded paths, and the hidden costs of JAX turned into errors."""

import importlib.util
import os
import pathlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

# Workers and later runs share what they compile; programs are looked up by their content.
COMPILED = pathlib.Path(__file__).parent.parent / ".pytest_cache/xla"
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(config, items):
    """Without the torch extra the live comparisons are not part of the suite."""
    if importlib.util.find_spec("torch") is None:
        live = [item for item in items if item.get_closest_marker("torch")]
        config.hook.pytest_deselected(items=live)
        items[:] = [item for item in items if item not in live]
