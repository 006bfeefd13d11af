"""Changes of single places in Python source, as `tests/mutants.py` makes them one at a time.

A sign, a comparison, a constant, a boolean, an index, a `detach`, a statement: each changed or left out.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

TO_REMOVE = {"detach", "clone", "contiguous", "float", "requires_grad_"}
_SWAPPED = [
    ("Add", "+", "Sub", "-"),
    ("Mult", "*", "Div", "/"),
    ("BitAnd", "&", "BitOr", "|"),
    ("Lt", "<", "LtE", "<="),
]
_SWAPPED += [("Gt", ">", "GtE", ">="), ("Eq", "==", "NotEq", "!="), ("Is", "is", "IsNot", "is not")]
_SWAPPED += [("In", "in", "NotIn", "not in")]
OPERATORS = {ast.FloorDiv: ("//", "*")}
for one, sign, other, opposite in _SWAPPED:
    OPERATORS |= {getattr(ast, one): (sign, opposite), getattr(ast, other): (opposite, sign)}


@dataclass(frozen=True)
class Mutant:
    path: str  # below megatron_ext
    function: tuple[int, int]  # the first and last line of the function with the change, or of the module
    start: tuple[int, int]  # line from 1, byte
    end: tuple[int, int]
    text: str

    def apply(self, source: str) -> str:
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        (first, a), (last, b) = self.start, self.end
        lines[first - 1 : last] = [lines[first - 1][:a] + self.text.encode() + lines[last - 1][b:]]
        return b"".join(lines).decode()

    def diff(self, source: str) -> str:
        before, after = source.splitlines(), self.apply(source).splitlines()
        old = " ".join(line.strip() for line in before[self.start[0] - 1 : self.end[0]])
        new = after[self.start[0] - 1].strip()
        return f"megatron_ext/{self.path}:{self.start[0]}\n    - {old}\n    + {new}"


# Arguments that change no result and no error of a right call: promises, options of waiting, options of launches.
SAYS_ONLY = {"strict", "frozen", "async_op", "num_warps", "num_stages", "maxnreg"}


def _says_only(node: ast.AST) -> bool:
    """Tell whether a node is an argument without effect on results, or the sleep of a polling loop."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "sleep"
    return isinstance(node, ast.keyword) and node.arg in SAYS_ONLY


def mutants_of(path: Path, package: Path) -> list[Mutant]:
    """Return every change of one place of a file, but none in messages, types, docstrings and imports."""
    source, found = path.read_text(), []
    lines = [line.encode() for line in source.splitlines()]

    def add(function, node, text, start=None, end=None):
        start = start or (node.lineno, node.col_offset)
        found.append(
            Mutant(str(path.relative_to(package)), function, start, end or (node.end_lineno, node.end_col_offset), text)
        )

    def between(function, left, right, old, new):
        """Add a change of the operator between two nodes that stand on one line."""
        if left.end_lineno == right.lineno:
            at = lines[right.lineno - 1].find(old.encode(), left.end_col_offset, right.col_offset)
            if at >= 0:
                add(function, left, new, (right.lineno, at), (right.lineno, at + len(old)))

    def of_expression(node, function):
        segment = lambda part: ast.get_source_segment(source, part)  # noqa: E731
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            between(function, node.left, node.right, *OPERATORS[type(node.op)])
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
            between(function, node.left, node.comparators[0], *OPERATORS[type(node.ops[0])])
        elif isinstance(node, ast.BoolOp):
            old = "and" if isinstance(node.op, ast.And) else "or"
            between(function, node.values[0], node.values[1], old, {"and": "or", "or": "and"}[old])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
            add(function, node, f"({segment(node.operand)})")
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            value = node.value
            add(function, node, str(not value if isinstance(value, bool) else value + 1))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in TO_REMOVE
            and not node.args
        ):
            add(function, node, segment(node.func.value))

    def walk(node, function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = (node.lineno, node.end_lineno)
            children = [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
        elif isinstance(node, ast.Raise):
            add(function, node, "pass")
            return
        elif _says_only(node) or isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
            return
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        else:
            children = ast.iter_child_nodes(node)
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _says_only(node.value)
        kept = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
        if function[0] and (called or kept or isinstance(node, ast.AugAssign)):
            add(function, node, "pass")
        if isinstance(node, ast.expr):
            of_expression(node, function)
        for child in children:
            walk(child, function)

    walk(ast.parse(source), (0, len(lines)))
    return found
