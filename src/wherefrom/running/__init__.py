"""Long work on this machine: how far it is, when it may stop, what memory and threads it takes."""
