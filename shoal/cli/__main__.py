"""``python -m shoal.cli``: what the installed ``shoal`` does."""

from __future__ import annotations

from shoal.cli import main

if __name__ == "__main__":
    main()
