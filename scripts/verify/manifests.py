#!/usr/bin/env python3
"""Check the manifests of scripts/examples/kubernetes against released CRDs, field by field.

    python scripts/verify/manifests.py FILE...

Each FILE holds CustomResourceDefinitions, as the releases of JobSet, Kubeflow's Trainer and the MPI
operator have them (`kubectl get crd -o yaml` prints those of a cluster). Types, required fields,
enumerations and patterns are checked, and a field that the schema does not have is an error. Rules
that only an API server evaluates (x-kubernetes-validations) are not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

MANIFESTS = Path(__file__).resolve().parents[1] / "examples" / "kubernetes"


def schemas(files: list[Path]) -> dict[tuple[str, str], Any]:
    """Return the schemas of all CRDs in files, by apiVersion and kind."""
    found = {}
    for document in (one for file in files for one in yaml.safe_load_all(file.read_text())):
        for spec in (one["spec"] for one in document.get("items", [document]) if one):
            for version in spec["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                # The API server knows it; CRDs leave it out
                schema["properties"]["metadata"] = {"type": "object"}
                close(schema)
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def close(schema: Any) -> None:
    """Let a schema refuse fields that it does not name, and take numbers where words also do."""
    if isinstance(schema, list):
        for one in schema:
            close(one)
    elif isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
        for one in schema.values():
            close(one)


def main() -> int:
    """Check all manifests; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    known = schemas(parser.parse_args().files)
    failed = False
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            name = document["apiVersion"], document["kind"]
            if name not in known:
                print(f"{path.name}  {' '.join(name)}  no such CRD in these files")
                failed = True
                continue
            errors = list(jsonschema.Draft7Validator(known[name]).iter_errors(document))
            print(f"{path.name}  {' '.join(name)}  {f'{len(errors)} errors' if errors else 'ok'}")
            for error in errors:
                print(f"    {error.json_path}: {error.message}")
            failed |= bool(errors)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
