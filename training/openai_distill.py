"""The old name of ``training.distill``, kept for one release."""

from training.distill import main

if __name__ == "__main__":
    raise SystemExit(main())
