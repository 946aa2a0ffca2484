"""Converted heads in torch: each layout in modules built as its runtime builds them, against our own."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file
from test_convert import BF16, F32, D, M, V, model, own, run, source, table_of, values  # noqa: F401

from medusa_jax import heads as heads_module
from medusa_jax.weights import torch_files
from medusa_jax.weights.head_files import open_heads

pytestmark = pytest.mark.torch


def ours(config, layers, token_map, table, states):
    """Logits [M, n, V'] by the module that decodes."""
    tokens = None if token_map is None else jnp.asarray(token_map)
    params = heads_module.attach(config, jax.tree.map(jnp.asarray, layers), jnp.asarray(table), tokens)
    path = jnp.zeros((len(states), M, D))
    x = jnp.asarray(states)
    return np.stack(
        [
            heads_module.logits(
                params, config, heads_module.state(params, config, x, m, path), m, jnp.asarray(table)
            )
            for m in range(M)
        ]
    )


def modules():
    """The residual block and head of the first implementation, and vLLM's, as torch modules."""
    torch = importlib.import_module("torch")
    nn = torch.nn

    class ResBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x):
            return x + nn.functional.silu(self.linear(x))

    class Reference(nn.Module):
        """A list of sequences, each of residual blocks and, in v1, a linear layer without bias."""

        def __init__(self, L, has_own):
            super().__init__()
            heads = [[ResBlock() for _ in range(L)] for _ in range(M)]
            if has_own:
                heads = [[*blocks, nn.Linear(D, V, bias=False)] for blocks in heads]
            self.heads = nn.ModuleList([nn.Sequential(*head) for head in heads])

        def forward(self, x, table):
            scores = [head(x) for head in self.heads]
            return torch.stack([s if s.shape[-1] == V else s @ table.T for s in scores])

    class Block(nn.Module):
        def __init__(self, L, bias):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(D, D, bias=bias) for _ in range(L)])

        def forward(self, x):
            for layer in self.layers:
                x = x + nn.functional.silu(layer(x))
            return x

    class VLLM(nn.Module):
        """Blocks with biases as config.json has it, tables apart, one where original_lm_head says so."""

        def __init__(self, config):
            super().__init__()
            heads, rows = config["num_heads"], config["truncated_vocab_size"]
            blocks = [Block(config["num_hidden_layers"], config["medusa_fc_bias"]) for _ in range(heads)]
            self.blocks = nn.ModuleList(blocks)
            if config["original_lm_head"]:
                self.lm_head = nn.Linear(D, rows, bias=False)
            else:
                self.lm_heads = nn.ModuleList([nn.Linear(D, rows, bias=False) for _ in range(heads)])

        def forward(self, x):
            tables = self.lm_heads if hasattr(self, "lm_heads") else [self.lm_head] * len(self.blocks)
            return torch.stack([table(block(x)) for block, table in zip(self.blocks, tables, strict=True)])

    return torch, Reference, VLLM


STATES = np.random.default_rng(2).normal(size=(5, D)).astype(F32)


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize(("to", "L"), [("reference", 1), ("tgi", 1), ("trtllm", 2), ("vllm", 1), ("vllm", 3)])
def test_torch_runs_the_same_heads(tmp_path, model, to, L, has_own):  # noqa: F811
    torch, Reference, VLLM = modules()
    config, layers, _ = made = values(own_unembedding=has_own, num_layers=L)
    folder = tmp_path / "target"
    run(own(tmp_path / "heads", made), folder, "--to", to, "--model", model)
    table = table_of(model)
    expected = ours(config, layers, None, table, STATES)
    x = torch.tensor(STATES)
    if to == "vllm":
        runner = VLLM(json.loads((folder / "config.json").read_text()))
        tensors = load_file(folder / "model.safetensors")
        runner.load_state_dict({n: torch.tensor(t) for n, t in tensors.items()})
        found = [runner(x)]
    else:
        runner = Reference(L, has_own or to == "trtllm")
        states = [{n: torch.tensor(t) for n, t in load_file(folder / "medusa_lm_head.safetensors").items()}]
        if (folder / "medusa_lm_head.pt").exists():
            for mmap in (False, True):
                states.append(torch.load(folder / "medusa_lm_head.pt", weights_only=True, mmap=mmap))
        assert len(states) == (3 if to == "trtllm" or (to == "reference" and has_own) else 1)
        found = []
        for state in states:
            runner.heads.load_state_dict(state)
            found.append(runner(x, torch.tensor(table)))
    for scores in found:
        np.testing.assert_allclose(scores.detach().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "prefix"), [("v1.0", "medusa_head."), ("mlc", "medusa_head."), ("modelopt", "medusa_heads.")]
)
@pytest.mark.parametrize("L", [1, 2])
def test_torch_runs_what_is_only_read(tmp_path, kind, prefix, L):
    """Layouts that are sources and no targets."""
    torch, Reference, _ = modules()
    config, layers, _ = values(own_unembedding=True, num_layers=L)
    folder = source(kind, tmp_path / "source", layers, L)
    tensors = load_file(folder / "model.safetensors")
    runner = Reference(L, True)
    runner.heads.load_state_dict(
        {n.removeprefix(prefix): torch.tensor(t) for n, t in tensors.items() if n.startswith(prefix)}
    )
    opened = open_heads(folder)
    assert opened.config == config
    unread = np.zeros((V, D), F32)
    expected = ours(config, opened.read(F32)[0], None, unread, STATES)
    found = runner(torch.tensor(STATES), torch.tensor(unread)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_torch_runs_the_same_draft_vocabulary(tmp_path, model):  # noqa: F811
    torch, _, VLLM = modules()
    for has_own in (True, False):
        config, layers, token_map = made = values(own_unembedding=has_own, draft_vocab_size=50)
        folder = tmp_path / f"target{has_own}"
        run(own(tmp_path / f"heads{has_own}", made), folder, "--to", "vllm", "--model", model)
        tensors = {n: torch.tensor(t) for n, t in load_file(folder / "model.safetensors").items()}
        assert tensors.pop("token_map").tolist() == token_map.tolist()
        runner = VLLM(json.loads((folder / "config.json").read_text()))
        runner.load_state_dict(tensors)
        found = runner(torch.tensor(STATES)).detach().numpy()
        expected = ours(config, layers, token_map, table_of(model), STATES)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_pt_written_here_is_read_by_torch_and_back(tmp_path, kind):
    torch = importlib.import_module("torch")
    dtype = {"float32": F32, "float16": np.dtype(np.float16), "bfloat16": BF16}[kind]
    layers = (made := values(dtype, own_unembedding=True, num_layers=2))[1]
    run(own(tmp_path / "heads", made), tmp_path / "target", "--to", "trtllm", "--check")
    file = tmp_path / "target/medusa_lm_head.pt"
    state = torch.load(file, weights_only=True)
    assert {t.dtype for t in state.values()} == {getattr(torch, kind)}
    for h in range(M):
        for layer in range(2):
            got = state[f"{h}.{layer}.linear.weight"]
            assert got.is_contiguous()
            np.testing.assert_array_equal(got.float().numpy(), layers["weight"][h, layer].astype(F32))
        np.testing.assert_array_equal(
            state[f"{h}.2.weight"].float().numpy(), layers["unembedding"][h].astype(F32)
        )
    # Written by torch and read by us, and the other way round.
    again = tmp_path / "again.pt"
    torch.save(state, again)
    run(again, tmp_path / "back", "--to", "medusa-jax")
    read = load_file(tmp_path / "back/heads.safetensors")
    for name, array in layers.items():
        assert read[f"layers.{name}"].tobytes() == array.tobytes()
    source = torch_files.TorchFile(file)
    assert source.read("1.2.weight").tobytes() == layers["unembedding"][1].tobytes()


def test_tied_storages(tmp_path, capsys):
    """Several layers of the first implementation are one object: its .pt names one storage several times."""
    torch = importlib.import_module("torch")
    state = {}
    for h in range(M):
        linear = torch.nn.Linear(D, D)
        for layer in range(2):
            state[f"{h}.{layer}.linear.weight"] = linear.weight
            state[f"{h}.{layer}.linear.bias"] = linear.bias
        state[f"{h}.2.weight"] = torch.randn(V, D)
    (tmp_path / "source").mkdir()
    torch.save(state, tmp_path / "source/medusa_lm_head.pt")
    run(tmp_path / "source", tmp_path / "target", "--to", "trtllm", "--check")
    assert "copies of one" in capsys.readouterr().err
    written = torch.load(tmp_path / "target/medusa_lm_head.pt", weights_only=True)
    for name, tensor in state.items():
        assert torch.equal(written[name], tensor)
    assert written["0.0.linear.weight"].data_ptr() != written["0.1.linear.weight"].data_ptr()


def test_transformers_loads_what_hf_writes(tmp_path, model):  # noqa: F811
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    run(own(tmp_path / "heads"), tmp_path / "target", "--to", "hf", "--model", model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    ids = tiny.tokenizer()("The quick brown fox")["input_ids"]
    before = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        a, b = theirs(torch.tensor([ids])).logits, before(torch.tensor([ids])).logits
    assert torch.equal(a, b)
