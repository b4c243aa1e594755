"""`python -m refusion_eval`: the same commands as `refusion-eval`."""

from refusion_eval.cli import main

if __name__ == "__main__":
    main()
