"""``python -m datastates.demo``: the main job."""

from .main_job import main

if __name__ == "__main__":
    raise SystemExit(main())
