"""What Triton makes of a kernel for a GPU that is not here."""

from collections.abc import Mapping
from typing import Any


def compiled(function: Any, kinds: Mapping[str, str], fixed: Mapping[str, Any], **options: int) -> Any:
    """`kinds` are the types of arguments that are no int32, `fixed` those known when it is compiled. Pointers, strides
    and sizes of layers are multiples of 16, as in an engine, and the kernel is compiled for that where it may be."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    found = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    constants = {(i,): fixed[name] for i, name in enumerate(names) if name in fixed}
    sizes = ("stride", "hidden", "wide", "narrow")
    any_value = {param.name for param in function.params if param.do_not_specialize}
    aligned = [name for name, kind in found.items() if kind.startswith("*") or name.endswith(sizes)]
    aligned = [name for name in aligned if name not in any_value]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, found, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
