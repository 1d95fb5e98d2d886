"""``python -m datastates.demo``: the main job."""

from .main_job import script

if __name__ == "__main__":
    raise SystemExit(script())
