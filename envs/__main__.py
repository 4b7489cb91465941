"""The household game's command, for the installed package: `python -m household`."""

from .household import main

if __name__ == "__main__":
    main()
