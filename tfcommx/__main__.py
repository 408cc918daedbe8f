"""`python -m tfcommx`: the command, also where its folder is not in PATH."""

from tfcommx.cli.main import main

if __name__ == "__main__":
    main()
