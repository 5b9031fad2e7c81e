"""`python -m pagedgen`: the same as the `pagedgen` command."""

from pagedgen.entry import main

main()
