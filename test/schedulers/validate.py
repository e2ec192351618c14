"""Checks documents against schemas: [[schema, document], ...] in JSON on standard input, a list of errors for each out."""

import json
import sys

import jsonschema


def errors(schema, document):
    found = jsonschema.Draft7Validator(schema).iter_errors(document)
    return ["%s: %s" % ("/".join(map(str, error.absolute_path)), error.message) for error in found]


json.dump([errors(*pair) for pair in json.load(sys.stdin)], sys.stdout)
