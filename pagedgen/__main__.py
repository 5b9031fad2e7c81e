"""`python -m pagedgen`: the same as the `pagedgen` command."""

from pagedgen.cli import main

main()
