"""No code of the package iterates over a set: its order depends on the hash seed, which every rank has for itself.

What is made in such an order (a plan, the order of collectives, a file) differs between ranks started apart. `sorted`,
`len`, `any` and the like, and sets made of sets, don't show an order.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for package in ("megatron_ext", "megatron_on_cpu") for path in sorted((ROOT / package).rglob("*.py"))]

MAKE_SETS = {"set", "frozenset"}
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}
SET_OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
# What takes an iterable and shows nothing of its order, and what takes one and does.
WITHOUT_ORDER = {"sorted", "len", "sum", "min", "max", "any", "all", "set", "frozenset", "Counter"}
IN_ORDER = {"list", "tuple", "iter", "enumerate", "zip", "map", "filter", "dict", "reversed", "chain", "accumulate"}
ORDERED_METHODS = {"join", "extend", "fromkeys", "from_iterable", "writelines"}


def annotated_set(annotation) -> bool:
    """Return whether an annotation names a set: `set[str]`, `frozenset[int] | None`, `AbstractSet[str]`."""
    if annotation is None:
        return False
    parts = ast.unparse(annotation).split("|")
    return any(part.strip().partition("[")[0].lower().endswith("set") for part in parts)


def functions_that_return_sets(trees) -> set[str]:
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and annotated_set(node.returns)}


class Scope:
    """Names of sets in a function or a file: those that some assignment or annotation makes one."""

    def __init__(self, node, makers: set[str], outer: "Scope | None" = None):
        self.makers = makers
        self.names = set(outer.names) if outer else set()
        arguments = node.args if isinstance(node, ast.FunctionDef | ast.Lambda) else None
        if arguments is not None:
            for one in arguments.posonlyargs + arguments.args + arguments.kwonlyargs:
                self.names.discard(one.arg)
                if annotated_set(one.annotation):
                    self.names.add(one.arg)
        for _ in range(2):  # a name may be made of one that stands further down
            for inner in own_nodes(node):
                if isinstance(inner, ast.Assign) and self.is_set(inner.value):
                    self.names.update(ast.unparse(target) for target in inner.targets)
                elif isinstance(inner, ast.NamedExpr) and self.is_set(inner.value):
                    self.names.add(inner.target.id)
                elif isinstance(inner, ast.AnnAssign) and annotated_set(inner.annotation):
                    self.names.add(ast.unparse(inner.target))

    def is_set(self, node) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Name | ast.Attribute):
            return ast.unparse(node) in self.names
        if isinstance(node, ast.BinOp) and isinstance(node.op, SET_OPERATORS):
            return any(self.is_set(side) or is_keys(side) for side in (node.left, node.right))
        if isinstance(node, ast.IfExp):
            return self.is_set(node.body) or self.is_set(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(self.is_set, node.values))
        if isinstance(node, ast.NamedExpr):
            return self.is_set(node.value)
        if isinstance(node, ast.Call):
            name = called(node)
            if isinstance(node.func, ast.Attribute) and name in SET_METHODS:
                return self.is_set(node.func.value) or is_keys(node.func.value)
            return name in MAKE_SETS or name in self.makers
        return False


def is_keys(node) -> bool:
    """`x.keys()` and `x.items()`: in order themselves, but not what is left of them by a set's operators."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "items")


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def own_nodes(node):
    """The nodes of a function or file without those of functions inside of it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from own_nodes(child)


def iterations(tree, makers: set[str]):
    """The line and text of each iteration over a set whose order shows."""
    free = set()  # generators, maps and the like whose order does not show
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in WITHOUT_ORDER:
            free.update(node.args)
        elif isinstance(node, ast.Set):
            free.update(node.elts)

    def visit(node, scope):
        for inner in own_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.Lambda):
                yield from visit(inner, Scope(inner, makers, scope))
            for taken in over(inner):
                if scope.is_set(taken):
                    yield taken.lineno, ast.unparse(taken)

    def over(node):
        if isinstance(node, ast.For):
            yield node.iter
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp) and node not in free:
            yield from (generator.iter for generator in node.generators)
        elif isinstance(node, ast.Starred):
            if node not in free:
                yield node.value
        elif isinstance(node, ast.Call) and node not in free:
            plain = isinstance(node.func, ast.Name) and node.func.id in IN_ORDER
            if plain or (isinstance(node.func, ast.Attribute) and node.func.attr in ORDERED_METHODS):
                yield from node.args

    yield from visit(tree, Scope(tree, makers))


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text()) for path in FILES}


def test_no_set_is_iterated_over(trees):
    makers = functions_that_return_sets(trees.values())
    found = [
        f"{path.relative_to(ROOT)}:{line} iterates over {text}"
        for path, tree in trees.items()
        for line, text in iterations(tree, makers)
    ]
    assert not found, "\n".join(["sort these, or keep them in a list or a dict:", *found])


@pytest.mark.parametrize(
    "code",
    [
        "for x in {1, 2}: f(x)",
        "plan = {name: 1 for name in set(names)}",
        "names = {n for n in m}\nplan = {name: 1 for name in names}",
        "names = {n for n in m}\ndef g():\n    return [n for n in names]",
        "def f(names: set[str]):\n    return list(names)",
        "def f(names: frozenset[str] | None = None):\n    return (*names,)",
        "[x for x in a.keys() - b.keys()]",
        "[x for x in a.keys() & b]",
        "', '.join({a, b} | c)",
        "for x in set(a).union(b): f(x)",
        "x = next(iter(set(a)))",
        "self.names = set()\nfor name in self.names: send(name)",
        "f(*{a, b})",
        "', '.join(map(str, {a, b}))",
        "dict.fromkeys(set(a))",
        "for i, x in enumerate({a, b}): f(i, x)",
        "def names() -> set[str]: ...\nfor name in names(): f(name)",
        "if odd := {n for n in m} - known:\n    for x in odd: f(x)",
        "for x in (set(a) if a else b): f(x)",
    ],
)
def test_iterations_that_are_found(code):
    tree = ast.parse(code)
    assert list(iterations(tree, functions_that_return_sets([tree])))


@pytest.mark.parametrize(
    "code",
    [
        "for x in sorted({1, 2}): f(x)",
        "any(f(x) for x in set(a))",
        "{f(x) for x in set(a)}",
        "[x for x in a if x in {1, 2}]",
        "for x in [1, 2]: f(x)",
        "b = set(a)\nc = {*b, 1}",
        "b = set(a)\n', '.join(sorted(map(str, b)))",
        "len(set(a))",
        "for x in a.keys(): f(x)",
        "total = sum(f(x) for x in {a, b})",
        "names = {n for n in m}\ndef g(names: list[str]):\n    return [n for n in names]",
        "for x in a - b: f(x)",
    ],
)
def test_what_shows_no_order(code):
    tree = ast.parse(code)
    assert not list(iterations(tree, functions_that_return_sets([tree])))
