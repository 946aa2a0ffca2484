"""Trees against brute force: arrays, refusals, files, the best tree of a size; drawings show every node."""

import errno
import functools
import itertools
import json
import pathlib
import struct
import sys

import jax
import numpy as np
import pytest
import rich.console
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax import UserError, tree_drawing
from medusa_jax.tree import MAX_DEPTH, MAX_NODES, MAX_RANKS, Tree, load_tree, published_names
from medusa_jax.tree_drawing import to_png, to_text

# Nodes per depth as counted in the first implementation's medusa_choices.py.
PUBLISHED = {
    "mc_sim_7b_63": (10, 28, 23, 2),
    "vicuna_7b_stage2": (10, 23, 23, 7),
    "vicuna_7b_stage1_ablation": (10, 21, 25, 7),
    "vicuna_7b_stage1": (10, 32, 20, 1),
    "vicuna_13b_stage2": (10, 19, 25, 9),
    "vicuna_13b_stage1": (10, 29, 23, 1),
    "vicuna_33b_stage2": (10, 24, 24, 5),
    "vicuna_33b_stage1": (10, 34, 19),
    "zephyr_stage2": (10, 27, 23, 3),
}


@st.composite
def path_sets(draw, max_nodes=24, max_rank=5, max_depth=6):
    """Prefix-closed sets of paths, ranks with gaps, in any order."""
    paths = [()]
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        above = draw(st.sampled_from([path for path in paths if len(path) < max_depth]))
        child = (*above, draw(st.integers(0, max_rank)))
        if child not in paths:
            paths.append(child)
    return draw(st.permutations(paths[1:]))


@st.composite
def rated_sets(draw, **sizes):
    """Paths with joint rates that fall along each path; ties and zeros are frequent."""
    rates = {(): 1.0}
    for path in sorted(draw(path_sets(**sizes)), key=len):
        rates[path] = rates[path[:-1]] * draw(st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0]))
    del rates[()]
    return rates


@settings(deadline=None, max_examples=200)
@given(path_sets())
def test_arrays_equal_the_relations_between_paths(paths):
    tree = Tree.from_paths([list(path) for path in paths])
    nodes = [(), *sorted(paths, key=lambda path: (len(path), path))]
    assert tree.paths == tuple(nodes[1:])
    assert tree.nodes == len(nodes)
    assert tree.max_depth == max(map(len, nodes))
    assert tree.width == 1 + max([0, *itertools.chain(*nodes)])
    for i, path in enumerate(nodes):
        assert nodes[tree.parent[i]] == path[:-1]
        assert tree.depth[i] == len(path)
        assert tree.rank[i] == (path[-1] if path else 0)
        assert tree.index[path] == i
        padded = [path[:depth] for depth in range(tree.max_depth + 1)]  # a slice past the end is the path
        assert [nodes[j] for j in tree.node_paths[i]] == padded
        for j, other in enumerate(nodes):
            assert tree.ancestors[i, j] == (path[: len(other)] == other)
        for rank in range(tree.width):
            child = (*path, rank)
            assert tree.children[i, rank] == (nodes.index(child) if child in nodes else -1)
    spine = [(0,) * depth for depth in range(tree.max_depth + 1)]
    assert tree.spine.tolist() == [nodes.index(path) if path in nodes else -1 for path in spine]
    shapes = {
        "parent": (tree.nodes,),
        "depth": (tree.nodes,),
        "rank": (tree.nodes,),
        "node_paths": (tree.nodes, tree.max_depth + 1),
        "children": (tree.nodes, tree.width),
        "spine": (tree.max_depth + 1,),
    }
    for name, shape in shapes.items():
        array = getattr(tree, name)
        assert (array.shape, array.dtype) == (shape, np.int32), name
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    assert tree.ancestors.shape == (tree.nodes, tree.nodes)
    assert tree.ancestors.dtype == bool


def test_an_equal_tree_is_the_same_static_argument():
    traced = []

    @functools.partial(jax.jit, static_argnames="tree")
    def depths(tree):
        traced.append(tree)
        return jax.numpy.asarray(tree.depth)

    one, same, other = (
        Tree.from_paths([[1], [0], [0, 0]]),
        Tree.from_paths(((0,), (0, 0), (np.int64(1),)), name="x"),
        Tree.chain(2),
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one.parent is one.parent
    for tree in (one, same, other):
        np.testing.assert_array_equal(depths(tree=tree), tree.depth)
    assert traced == [one, other]
    with pytest.raises(AttributeError):
        one.paths = ()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("0", "expected a list of paths, found str"),
        (3, "expected a list of paths, found int"),
        ([0], "path 0 is not a list of ranks"),
        (["00"], "path '00' is not a list of ranks"),
        ([[]], "a path is empty"),
        ([[0], [1], [0]], r"path \[0\] is there twice"),
        ([[0], [1, 0]], r"path \(1, 0\) is there without its parent \(1,\)"),
        ([[0], [0, 1, 2]], r"path \(0, 1, 2\) is there without its parent \(0, 1\)"),
        ([[-1]], r"path \[-1\] has rank -1, expected 0 to 63"),
        ([[MAX_RANKS]], r"path \[64\] has rank 64, expected 0 to 63"),
        ([[True]], r"path \[True\] has rank True, expected an integer"),
        ([[1.0]], r"path \[1.0\] has rank 1.0, expected an integer"),
        ([["0"]], r"path \['0'\] has rank '0', expected an integer"),
        ([[None]], "has rank None, expected an integer"),
        ([[0] * depth for depth in range(1, MAX_DEPTH + 2)], "has 17 entries, at most 16"),
        ([[0] * 10_000], r"path \[0, 0, .*\.\.\. has 10000 entries"),
        (
            [[a, b][:n] for n in (1, 2) for a in range(33) for b in range(n * 33 - 33 or 1)],
            "more than 1024 nodes",
        ),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths, message):
    with pytest.raises(UserError, match=f"^somewhere: .*{message}") as caught:
        Tree.from_paths(paths, name="somewhere")
    assert len(str(caught.value)) < 200


def test_the_limits_themselves_are_accepted():
    assert Tree.chain(MAX_DEPTH).max_depth == MAX_DEPTH
    assert Tree.dense((MAX_RANKS,)).width == MAX_RANKS
    assert Tree.dense((31, 32)).nodes == MAX_NODES
    assert Tree.dense((31, 32)) == Tree.from_paths(reversed(Tree.dense((31, 32)).paths))


@pytest.mark.parametrize("paths", [((1,), (0,)), [(0,)], ([0],), ((0, 0),)])
def test_the_constructor_takes_nothing_but_sorted_paths(paths):
    with pytest.raises(UserError, match=r"^tree: "):
        Tree(paths)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees(name):
    tree = Tree.named(name)
    assert len(tree.paths) == 63
    assert tuple(np.bincount(tree.depth)) == (1, *PUBLISHED[name])
    assert tree.width == 10
    # Their sibling ranks happen to be consecutive.
    assert all(
        ((tree.children[i] >= 0) == (np.arange(10) < np.sum(tree.parent[1:] == i))).all() for i in range(64)
    )
    assert Tree.parse(name) == tree


def test_published_names():
    assert set(published_names()) == set(PUBLISHED)
    with pytest.raises(
        UserError, match=r"^tree 'vicuna': not a published tree; those are mc_sim_7b_63, .*zephyr"
    ):
        Tree.named("vicuna")


def test_single_chain_and_dense():
    single = Tree.single()
    assert (single.nodes, single.max_depth, single.width, single.paths) == (1, 0, 1, ())
    assert single == Tree.chain(0) == Tree.dense(()) == Tree.from_paths([])
    assert single.children.tolist() == [[-1]]
    assert single.node_paths.tolist() == [[0]]
    assert Tree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    dense = Tree.dense((2, 3, 2))
    assert np.bincount(dense.depth).tolist() == [1, 2, 6, 12]
    assert [np.max(dense.rank[dense.depth == depth]) for depth in (1, 2, 3)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tree.chain(-1), "chain of depth -1, expected 0 to 16"),
        (lambda: Tree.chain(17), "tree of 17 widths: at most 16"),
        (lambda: Tree.dense((2, 0)), "tree 2x0: width 0 is not between 1 and 64"),
        (lambda: Tree.dense((65,)), "tree 65: width 65 is not between 1 and 64"),
        (lambda: Tree.dense((32, 32)), "tree 32x32: has 1057 nodes, at most 1024"),
        (lambda: Tree.dense((64,) * 16), "at most 1024"),  # refused before it is built
    ],
)
def test_chains_and_widths_that_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_parse_tells_widths_names_and_files_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Tree.parse("2x3x2") == Tree.dense((2, 3, 2))
    assert Tree.parse("4") == Tree.dense((4,))
    assert Tree.parse("1x1x1") == Tree.chain(3)
    for name in ("mine.json", "mine", "4", "zephyr_stage2"):
        Tree.chain(2).save(name)
    assert Tree.parse("mine.json") == Tree.parse("mine") == Tree.parse("./4") == Tree.chain(2)
    assert Tree.parse(str(tmp_path / "4")) == Tree.chain(2)
    assert Tree.parse("4") == Tree.dense((4,))
    assert Tree.parse("zephyr_stage2") == Tree.named("zephyr_stage2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither widths"),
        (
            "vicuna",
            "^tree 'vicuna': neither widths .* nor a file, nor one of mc_sim_7b_63, .*, zephyr_stage2$",
        ),
        ("2x", "neither widths"),
        ("x2", "neither widths"),
        ("2X3", "neither widths"),
        ("-1", "neither widths"),
        ("٣", "neither widths"),
        ("9" * 5000, "neither widths"),
        ("0", "width 0"),
        ("2x100", "width 100"),
        ("40x40", "1641 nodes"),
        ("missing.json", "^missing.json: no such file"),
        ("missing/tree", "^missing/tree: no such file"),
    ],
)
def test_what_parse_refuses(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        Tree.parse(text)


@settings(deadline=None, max_examples=50)
@given(rated_sets())
def test_files_give_back_the_tree_and_its_rates(tmp_path_factory, rates):
    folder = tmp_path_factory.mktemp("trees")
    tree = Tree.from_paths(rates)
    tree.save(folder / "tree.json")
    assert load_tree(folder / "tree.json") == (tree, None)
    tree.save(folder / "tree.json", rates | {(9,): 0.5})  # more may have been measured
    assert Tree.load(str(folder / "tree.json")) == tree
    assert load_tree(folder / "tree.json") == (tree, rates)
    assert [file.name for file in folder.iterdir()] == ["tree.json"]


def test_a_file_is_a_list_or_an_object_in_any_order(tmp_path):
    file = tmp_path / "t"
    file.write_text("[[1], [0, 2], [0]]")
    assert load_tree(file) == (Tree.from_paths([(0,), (1,), (0, 2)]), None)
    file.write_text('{"model": "m", "hit_rates": [0.25, 0.125, 1], "paths": [[1], [0, 2], [0]]}')
    assert load_tree(file)[1] == {(0,): 1.0, (1,): 0.25, (0, 2): 0.125}
    file.write_text('{"hit_rates": null, "paths": []}')
    assert load_tree(file) == (Tree.single(), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[[0]", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "nested"),
        (b"3", "expected a list of paths, found int"),
        (b'"0"', "expected a list of paths, found str"),
        (b"{}", 'the object has no "paths"'),
        (b'{"paths": {"0": 1}}', "expected a list of paths, found dict"),
        (b"[[0, 0]]", "without its parent"),
        (b"[[0], [true]]", "expected an integer"),
        (b'{"paths": [[0]], "hit_rates": 0.5}', '"hit_rates" is float, expected a list of 1'),
        (b'{"paths": [[0]], "hit_rates": [0.5, 0.2]}', '"hit_rates" is 2, expected a list of 1'),
        (b'{"paths": [[0]], "hit_rates": ["1"]}', r"the hit rate of \(0,\) is '1', expected 0 to 1"),
        (b'{"paths": [[0]], "hit_rates": [true]}', "is True, expected 0 to 1"),
        (b'{"paths": [[0]], "hit_rates": [NaN]}', "is nan, expected 0 to 1"),
        (b'{"paths": [[0]], "hit_rates": [1.01]}', "is 1.01, expected 0 to 1"),
        (b'{"paths": [[0], [0, 0]], "hit_rates": [0.5, 0.6]}', r"of \(0, 0\) is 0.6, above its parent's 0.5"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path, content, message):
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"broken.json: .*{message}"):
        load_tree(file)


def test_unreadable_and_unwritable_files(tmp_path):
    with pytest.raises(UserError, match="missing: no such file"):
        Tree.load(tmp_path / "missing")
    with pytest.raises(UserError, match="is a directory, expected a file"):
        Tree.load(tmp_path)
    with pytest.raises(UserError, match=r"missing/t\.json: cannot be written"):
        Tree.single().save(tmp_path / "missing/t.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder: is a directory"):
        Tree.single().save(tmp_path / "folder")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "tree.json"
    Tree.chain(1).save(file)
    with pytest.raises(UserError, match=r"none for path \(0, 0\)"):
        Tree.chain(2).save(file, {(0,): 0.5})

    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", full_disk)
    with pytest.raises(UserError, match=r"tree\.json: cannot be written \(No space left on device\)"):
        Tree.chain(2).save(file)
    assert json.loads(file.read_text()) == {"paths": [[0]]}
    assert list(tmp_path.iterdir()) == [file]


@settings(deadline=None)
@given(path_sets(), st.integers(-1, 7))
def test_cuts_keep_what_fits(paths, most):
    tree = Tree.from_paths(paths)
    assert set(tree.cut(most).paths) == {path for path in paths if len(path) <= most}
    assert set(tree.cut_ranks(most).paths) == {path for path in paths if max(path) <= most}
    assert tree.cut(tree.max_depth) == tree.cut_ranks(tree.width - 1) == tree


def subtrees(paths, size):
    """Every prefix-closed set of `size` of these paths."""
    for chosen in itertools.combinations(paths, size):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


@settings(deadline=None, max_examples=60)
@given(rated_sets(max_nodes=10, max_rank=3), st.randoms())
def test_grown_trees_are_the_best_of_their_size_and_nested(rates, random):
    before = Tree.single()
    for nodes in range(1, len(rates) + 3):
        grown = Tree.grow(rates, nodes)
        size = min(nodes - 1, len(rates))
        assert len(grown.paths) == size
        best = max(sum(rates[path] for path in chosen) for chosen in subtrees(list(rates), size))
        assert grown.expected_tokens(rates) == pytest.approx(1 + best, abs=1e-12)
        assert set(before.paths) <= set(grown.paths)
        shuffled = list(rates.items())
        random.shuffle(shuffled)
        assert Tree.grow(dict(shuffled), nodes) == grown
        before = grown


def test_equal_rates_go_by_depth_then_path():
    rates = dict.fromkeys([(0,), (0, 0), (0, 0, 0), (1,), (1, 0)], 0.5)
    order = [Tree.grow(rates, nodes).paths for nodes in (2, 3, 4, 5, 6)]
    added = [set(b) - set(a) for a, b in itertools.pairwise([(), *order])]
    assert added == [{(0,)}, {(1,)}, {(0, 0)}, {(1, 0)}, {(0, 0, 0)}]


def test_expected_tokens_is_one_and_the_rates():
    rates = {(0,): 0.5, (1,): np.float32(0.25), (0, 0): 0.125, (2,): 0.0625}
    assert Tree.single().expected_tokens({}) == 1
    assert Tree.from_paths([(0,), (1,), (0, 0)]).expected_tokens(rates) == 1.875


@pytest.mark.parametrize(
    ("rates", "nodes", "message"),
    [
        ({(0,): 0.5}, 0, "tree of 0 nodes: expected 1 to 1024"),
        ({(0,): 0.5}, 1025, "tree of 1025 nodes: expected 1 to 1024"),
        ({(0,): 0.5, (1, 0): 0.1}, 4, r"hit rates: path \(1, 0\) is there without its parent \(1,\)"),
        ({(): 1.0, (0,): 0.5}, 4, "hit rates: a path is empty"),
        ({(0,): -0.1}, 4, "is -0.1, expected 0 to 1"),
        ({(0,): float("nan")}, 4, "is nan, expected 0 to 1"),
        (
            {(0,): 0.5, (0, 0): 0.7},
            4,
            r"of \(0, 0\) is 0.7, above its parent's 0.5; a rate is the probability",
        ),
    ],
)
def test_rates_that_are_refused(rates, nodes, message):
    with pytest.raises(UserError, match=message):
        Tree.grow(rates, nodes)


def test_more_rates_than_nodes_can_be_measured():
    paths = [p for depth in (1, 2, 3, 4) for p in itertools.product(range(8), repeat=depth)]
    rates = {path: 0.5 ** (sum(path) + len(path)) for path in paths}
    assert Tree.grow(rates, 64).nodes == 64


def text_of(tree, rates=None):
    console = rich.console.Console(width=100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(to_text(tree, rates))
    return capture.get().splitlines()


def test_text_has_a_line_for_each_node():
    assert text_of(Tree.single()) == ["1 node, depth 0"]
    tree = Tree.named("vicuna_7b_stage2")
    head, *lines = text_of(tree)
    assert head == "64 nodes, depth 4"
    # Depth first; four columns of guides a level, then the rank.
    walked = [
        (len(line) - len(line.lstrip("│├└─ \u00a0")), int(line.lstrip("│├└─ \u00a0"))) for line in lines
    ]
    assert walked == [(4 * len(path), path[-1]) for path in sorted(tree.paths)]


def test_text_shows_rates_where_they_are_known():
    tree = Tree.from_paths([(0,), (3,), (0, 0)])
    lines = text_of(tree, {(0,): 0.623, (3,): 0.0123, (0, 0): 0.0})
    assert lines[0] == "4 nodes, depth 2, 1.64 tokens per step"
    assert [line.split()[-2:] for line in lines[1:]] == [["62", "%"], ["0", "%"], ["1.2", "%"]]
    lines = text_of(tree, {(0,): 1})
    assert lines[0] == "4 nodes, depth 2"
    assert [line.split()[-1] for line in lines[1:]] == ["%", "0", "3"]
    with pytest.raises(UserError, match="is 62, expected 0 to 1"):
        to_text(tree, {(0,): 62})


@settings(deadline=None, max_examples=200)
@given(path_sets())
def test_drawn_nodes_keep_apart_in_order_with_parents_amid_children(paths):
    tree = Tree.from_paths(paths)
    rows = tree_drawing._rows(tree)
    assert set(rows) == {(), *paths}
    assert min(rows.values()) == pytest.approx(0, abs=1e-9)
    for depth in range(tree.max_depth + 1):
        layer = sorted(path for path in rows if len(path) == depth)
        for above, below in itertools.pairwise(layer):
            least = 1 if above[:-1] == below[:-1] else tree_drawing.COUSINS
            assert rows[below] - rows[above] > least - 1e-9
    for node, path in enumerate(((), *tree.paths)):
        below = [rows[tree.paths[child - 1]] for child in tree.children[node] if child > 0]
        if below:
            assert rows[path] == pytest.approx((below[0] + below[-1]) / 2)


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("name", ["single", "chain", "published", "gaps"])
def test_png(tmp_path, name):
    pytest.importorskip("matplotlib")
    tree = {
        "single": Tree.single(),
        "chain": Tree.chain(5),
        "published": Tree.named("vicuna_7b_stage2"),
        "gaps": Tree.from_paths([(7,), (7, 9), (7, 3)]),
    }[name]
    to_png(tree, tmp_path / "plain.png")
    to_png(tree, tmp_path / "rates.png", {path: 0.6 ** len(path) for path in tree.paths[1:]}, title="A title")
    width, height = png_size(tmp_path / "plain.png")
    assert (width > height) == (name != "published")
    plain, rated = ((tmp_path / f"{kind}.png").read_bytes() for kind in ("plain", "rates"))
    assert plain != rated
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plain.png", "rates.png"]


def test_every_node_of_a_png_has_its_own_place_and_its_label(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn = []
    text = Axes.text
    monkeypatch.setattr(
        Axes, "text", lambda axes, x, y, s, **style: drawn.append((x, y, s)) or text(axes, x, y, s, **style)
    )
    tree = Tree.named("mc_sim_7b_63")
    to_png(tree, tmp_path / "tree.png")
    labels = [(x, y, s) for x, y, s in drawn if s.isdigit()]
    assert len(labels) == 63
    layers = sorted({x for x, _, _ in labels})
    for depth, layer in enumerate(layers, 1):
        rows = sorted((y for x, y, _ in labels if x == layer), reverse=True)
        assert len(rows) == PUBLISHED["mc_sim_7b_63"][depth - 1]
        assert np.min(-np.diff(rows)) > 0.26  # inches; a node is 0.205 high
        ranks = [int(s) for y, s in sorted(((y, s) for x, y, s in labels if x == layer), reverse=True)]
        assert ranks == [path[-1] for path in tree.paths if len(path) == depth]


def test_png_errors(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is 2, expected 0 to 1"):
        to_png(Tree.chain(1), tmp_path / "t.png", {(0,): 2})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"t.png: drawing needs matplotlib: pip install 'medusa-jax\[plot\]'"):
        to_png(Tree.single(), tmp_path / "t.png")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="cannot be written"):
        to_png(Tree.single(), tmp_path / "missing/t.png")
