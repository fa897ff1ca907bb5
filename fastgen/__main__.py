"""`python -m fastgen`, the same as the command `fastgen`."""

from fastgen.cli import main

if __name__ == "__main__":
    main(prog_name="fastgen")
