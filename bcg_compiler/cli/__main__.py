"""``python -m bcg_compiler.cli``, for launchers that start modules."""

from bcg_compiler.cli import main

main()
