"""What an engine's own classes make of messages, given in hex: a line of JSON."""

import importlib
import json
import sys

import msgspec

module, *messages = sys.argv[1:]
decoder = msgspec.msgpack.Decoder(type=importlib.import_module(module).KVEventBatch)
found = []
for message in messages:
    for event in decoder.decode(bytes.fromhex(message)).events:
        fields = {name: getattr(event, name) for name in event.__struct_fields__}
        found.append({"type": type(event).__name__, **fields})
print("OUT" + json.dumps(found))
