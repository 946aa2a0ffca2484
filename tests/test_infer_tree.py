"""python -m infer.tree: the drawing, the picture, mistakes."""

import sys

import pytest

from infer import cli, tree
from medusa_jax.tree import Tree


@pytest.fixture
def draw(capsys):
    """Runs the command in this process; returns status, output and messages."""

    def run(*argv: str) -> tuple[int, str, str]:
        status = cli._status(lambda _: tree.run(argv))
        return status, *capsys.readouterr()

    return run


def test_widths_names_and_files(draw, tmp_path):
    status, out, err = draw("2x1")
    assert (status, err) == (0, "")
    assert out.splitlines() == ["5 nodes, depth 2", "├── 0", "│   └── 0", "└── 1", "    └── 0"]
    assert draw("mc_sim_7b_63")[1].startswith(f"{Tree.named('mc_sim_7b_63').nodes} nodes")
    file = tmp_path / "tree.json"
    Tree.dense((2,)).save(file, {(0,): 0.5, (1,): 0.25})
    assert draw(str(file))[1].splitlines() == [
        "3 nodes, depth 1, 1.75 tokens per step",
        "├── 0  50 %",
        "└── 1  25 %",
    ]


def test_a_picture(draw, tmp_path):
    pytest.importorskip("matplotlib")
    assert draw("2x1", "--png", str(tmp_path / "tree.png"))[0] == 0
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["tree.png"]


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        ((), "the following arguments are required"),
        (("nothing",), "neither widths"),
        (("2x0",), "width 0"),
        (("./none.json",), "none.json: no such file"),
        (("/dev/zero",), "/dev/zero: a pipe, socket or device"),
        (("2", "--png", "/dev/null"), "--png /dev/null: cannot be written"),
        (("2", "--png", "/nowhere/tree.png"), "/nowhere/tree.png: cannot be written"),
    ],
)
def test_mistakes(draw, argv, fragment):
    if "/nowhere/tree.png" in argv:
        pytest.importorskip("matplotlib")
    status, out, err = draw(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert fragment in err


def test_help_does_not_wait_for_jax():
    assert tree.make_parser().format_help().startswith("usage: python -m infer.tree")
    assert tree.__name__ in sys.modules
