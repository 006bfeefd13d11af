"""Run the first steps of a script stock and with our head or layers, and show how they differ.

    torchrun --nproc-per-node 2 -m megatron_ext.compare --cpu pretrain_gpt.py --num-layers 2 ...

Takes the launcher's options; `--linear-ce` is added if no option changes the script. Ends with a table and a picture,
`compare.png` or `--picture FILE`. The exit code is 1 if losses differ by more than `--tolerance` or gradient norms by
more than ten times that, if `--linear-ce` fused no loss, or if `MEGATRON_EXT_FUSION=off` leaves nothing to compare.
"""

import sys
from pathlib import Path

from megatron_ext import run


def main(argv: list[str] | None = None) -> None:
    """Compare as the arguments say; None: the process's arguments."""
    given = sys.argv[1:] if argv is None else argv
    parser = run.command_line("python -m megatron_ext.compare", "Compare a script's first steps, stock and ours.")
    options = parser.parse_args(given)
    if not (options.linear_ce or options.tensor_parallel or options.pipeline_vocab):
        options.linear_ce, given = True, ["--linear-ce", *given]
    if options.verify is None:
        options.verify = 5
    if options.picture is None:
        options.picture = Path("compare.png")
    run.verify(parser, options, given, must_compare=True)


if __name__ == "__main__":
    main()
