"""Prints the OpenAPI document, without a repository:

python -m datastates.api.document > openapi.json
"""

from __future__ import annotations

import json
import sys

from .app import create_app


def main() -> None:
    json.dump(create_app({}).openapi(), sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
