"""Changes to other projects, a file each, named for the fault that it mends. See README.md."""
