"""The kernels compiled for a device that need not be here: ``python -m tests.state.compiled``.
The interpreter takes more."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from datastates.state import kernels

WORDS, NUMBERS = "*u64", "*i64"
SUMS = {
    "tiles": NUMBERS,
    "edges": "i64",
    "secret": WORDS,
    "out": WORDS,
    "most": "constexpr",
    "at_once": "constexpr",
}
CHAIN = {
    "added": WORDS,
    "edges": "i64",
    "ends": NUMBERS,
    "words": WORDS,
    "out": WORDS,
    "longest": "i32",
}


def main() -> None:
    """For compute capability 9.0; prints how large the machine code of each is."""
    target = GPUTarget("cuda", 90, 32)
    sums = ASTSource(
        kernels.sums,
        signature=SUMS,
        constexprs={"most": kernels._MOST, "at_once": kernels._AT_ONCE},
    )
    chain = ASTSource(kernels.chain, signature=CHAIN)
    for source, options in ((sums, {}), (chain, {"num_warps": 1})):
        # the test reads it
        print(len(compile(source, target=target, options=options).asm["cubin"]))  # noqa: T201


if __name__ == "__main__":
    main()
