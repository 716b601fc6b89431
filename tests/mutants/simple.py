"""Simple mutations of one file: a comparison turned, a sign, a constant, a call dropped, `return None`."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

TURNED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


class Mutation(NamedTuple):
    line: int
    was: str
    becomes: str
    source: str  # the whole file with it


def mutations(source: str) -> Iterator[Mutation]:
    """All of them, from top to bottom."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in sorted(_code(tree), key=lambda node: (node.lineno, node.col_offset)):
        if (becomes := _mutated(node)) is not None:
            first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            text = source.encode()
            changed = (text[:first] + becomes.encode() + text[last:]).decode()
            yield Mutation(node.lineno, text[first:last].decode(), becomes, changed)


def _code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """What runs: no types, no strings, no imports."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr | ast.stmt) and not isinstance(child, ast.JoinedStr | ast.Import):
                yield child
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _code(child)


def _mutated(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in TURNED:
            return f"({ast.unparse(ast.Compare(node.left, [TURNED[type(operator)]()], node.comparators))})"
        case ast.BinOp(op=operator) if type(operator) in TURNED and not isinstance(node.left, ast.JoinedStr):
            return f"({ast.unparse(ast.BinOp(node.left, TURNED[type(operator)](), node.right))})"
        case ast.BoolOp():
            return f"({ast.unparse(ast.BoolOp(TURNED[type(node.op)](), node.values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            return str(not node.value)
        case ast.Constant(value=int() | float()):
            return f"({node.value} + 1)"
        case ast.Expr(value=ast.Call()):
            return "pass"
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            return "return None"
    return None
