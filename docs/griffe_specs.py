"""Signatures that are nowhere in the code that is read: of specs, which pydantic makes from fields, and of the methods
that `SyncEngine` makes of `Engine`'s."""

import ast
import copy

import griffe


class SpecSignatures(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        named = {one.name: one for one in _classes(pkg)}  # names of specs are their own in the package
        for found in named.values():
            line = _line(found, named)
            if line[0].name != "Spec":
                continue
            fields = {name: field for one in line for name, field in one.members.items() if _is_field(name, field)}
            parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
            parameters += [_parameter(field) for field in fields.values()]
            found.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters)))
        if "SyncEngine" in named:
            _show_methods(named["SyncEngine"], _line(named["Engine"], named))


def _show_methods(blocking: griffe.Class, line: list[griffe.Class]) -> None:
    """Put the methods of the asynchronous engine in place of the attributes that are made of them."""
    methods = {name: method for one in line for name, method in one.members.items()}
    for name, found in list(blocking.members.items()):
        if isinstance(found, griffe.Attribute) and "Engine." in str(found.value):
            copied = copy.copy(methods[name])
            copied.labels = methods[name].labels - {"async", "abstractmethod"}
            copied.returns = str(methods[name].returns).replace("AsyncGenerator", "Iterator")
            blocking.set_member(name, copied)


def _classes(module: griffe.Module) -> list[griffe.Class]:
    found: list[griffe.Class] = []
    for one in module.members.values():
        if isinstance(one, griffe.Class):
            found.append(one)
        elif isinstance(one, griffe.Module):
            found += _classes(one)
    return found


def _line(found: griffe.Class, named: dict[str, griffe.Class]) -> list[griffe.Class]:
    """The class behind those it is made of, first bases only; `Spec` is the first of every spec's."""
    line = [found]
    while line[0].bases and (base := named.get(str(line[0].bases[0]).rpartition(".")[2])) and base not in line:
        line.insert(0, base)
    return line


def _is_field(name: str, field: griffe.Object | griffe.Alias) -> bool:
    if not isinstance(field, griffe.Attribute) or field.annotation is None or name.startswith("_"):
        return False
    kind = str(field.annotation)
    is_mark = kind.startswith("Literal[") and "," not in kind  # tells JSON which of several specs it is
    return "instance-attribute" in field.labels and not is_mark


def _parameter(field: griffe.Attribute) -> griffe.Parameter:
    default = str(field.value) if field.value is not None else None
    if default and default.startswith("Field("):
        call = ast.parse(default, mode="eval").body
        given = {word.arg: ast.unparse(word.value) for word in call.keywords} if isinstance(call, ast.Call) else {}
        made = f"{given['default_factory']}()" if "default_factory" in given else None
        default = given.get("default", made)
    return griffe.Parameter(
        field.name, annotation=field.annotation, kind=griffe.ParameterKind.keyword_only, default=default
    )
