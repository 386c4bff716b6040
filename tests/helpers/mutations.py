"""Inputs with one thing wrong: a value of JSON replaced, bytes cut off, flipped or in another encoding.

All is drawn from a `random.Random`, so that a case can be had again by its seed.
"""

import gzip
import io
import json
import zipfile

HUGE = "9" * 400
DEEP = "[" * 100_000
NASTY_TEXTS = ("x", "", "\x1b[31mred", "\u202eevil", "a\nb", "$x^{$", "\x00", "µ" * 2000, "conv2d:1x", "-1")
# As JSON has them, also what Python could not write.
VALUES = (
    *("null", "[]", "{}", "-1", "0", "1", "0.5", "NaN", "Infinity", "-Infinity", "1e308", "1e-320", "1e999", "true"),
    *("false", HUGE, "-" + HUGE, "9" * 5000, "[null]", '["x"]', "[[1]]", '{"a": 1}', "[1, 2]", '"\\ud800"'),
    *(DEEP, '{"a":' * 5000 + "1" + "}" * 5000, "[" * 90 + "]" * 90, "9223372036854775808", "2147483648"),
    *map(json.dumps, NASTY_TEXTS),
)
NOTHING = (b"", b"\n", b" ", b"\0" * 100, b"\x1f\x8b", b"PK\x03\x04", b"{", b"[", b"null")
_HERE = "\N{SNOWMAN}here\N{SNOWMAN}"


def places(value, path=()):
    """The paths to all values within a value of JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value, path, new):
    """A copy of a value with another one in a place."""
    if not path:
        return new
    key, *rest = path
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[key] = replaced(copied[key], rest, new)
    return copied


def mutated_json(text, random):
    """A text of JSON with one value replaced, left out or repeated under its key; and what was done."""
    value = json.loads(text)
    alike = {}  # the places of one kind, whatever their number in a list: each kind is as likely
    for each in places(value):
        alike.setdefault(tuple(0 if isinstance(key, int) else key for key in each), []).append(each)
    alike.pop(())
    path = random.choice(random.choice(list(alike.values())))
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    how = random.choice(("replace",) * 8 + ("drop", "repeat", "add"))
    new = random.choice(VALUES)
    if how == "drop":
        keys = [key for key in inside if key != path[-1]] if isinstance(inside, dict) else range(1, len(inside))
        fewer = {key: inside[key] for key in keys} if isinstance(inside, dict) else [inside[key] for key in keys]
        return json.dumps(replaced(value, path[:-1], fewer)), f"{path} left out"
    if how == "add" and isinstance(inside, dict):
        more = json.dumps(replaced(value, path[:-1], {**inside, "unknown": _HERE}))
        return more.replace(json.dumps(_HERE), new), f"{path[:-1]} with unknown={new[:30]}"
    if how == "repeat" and isinstance(inside, dict):
        twice = json.dumps(replaced(value, path, _HERE))
        first = f"{json.dumps(inside[path[-1]])}, {json.dumps(path[-1])}: {new}"
        return twice.replace(json.dumps(_HERE), first), f"{path} twice, then {new[:30]}"
    marked = json.dumps(replaced(value, path, _HERE))
    return marked.replace(json.dumps(_HERE), new), f"{path}={new[:30]}"


def mutated_bytes(data, random):
    """Bytes with a part cut off, flipped, repeated, or all in another encoding; and what was done."""
    how = random.choice(("cut", "cut", "flip", "flip", "flip", "junk", "encoding", "empty", "repeat", "zeros"))
    place = random.randrange(len(data))
    if how == "cut":
        return data[:place], f"cut off at {place}"
    if how == "flip":
        flipped = bytearray(data)
        for _ in range(random.choice((1, 1, 4, 64))):
            flipped[random.randrange(len(data))] ^= 1 << random.randrange(8)
        return bytes(flipped), "bits flipped"
    if how == "junk":
        return data[:place] + random.randbytes(random.choice((1, 16, 300))) + data[place:], f"junk at {place}"
    if how == "encoding":
        codec = random.choice(("utf-16", "utf-32", "utf-8-sig"))
        return data.decode("latin-1").encode(codec), f"as {codec}"
    if how == "empty":
        return random.choice(NOTHING), "nothing"
    if how == "repeat":
        return data + data, "twice"
    return data[:place] + bytes(len(data[place : place + 64])) + data[place + 64 :], f"zeros at {place}"


def mutated_text(data, random):
    """JSON as bytes, mutated as a value or as bytes."""
    if random.random() < 0.75:
        text, what = mutated_json(data.decode(), random)
        return text.encode("utf-8", "surrogatepass"), what
    return mutated_bytes(data, random)


def mutated_lines(data, random):
    """Lines of JSON, of which one is mutated, or the bytes as a whole."""
    if random.random() < 0.2:
        return mutated_bytes(data, random)
    lines = data.splitlines()
    number = random.randrange(len(lines))
    lines[number], what = mutated_text(lines[number], random)
    return b"\n".join(lines) + b"\n", f"line {number + 1}: {what}"


def mutated_gzip(data, random, inner):
    """Compressed data that are damaged, or whose contents are mutated."""
    if random.random() < 0.3:
        return mutated_bytes(data, random)
    contents, what = inner(gzip.decompress(data), random)
    return gzip.compress(contents, 1), f"packed: {what}"


def mutated_zip(data, random, text_names):
    """An archive that is damaged, lacks a member, or of which one is mutated, as JSON where its name is given."""
    if random.random() < 0.25:
        return mutated_bytes(data, random)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice([each for each in members if each in text_names] * 3 + list(members))
    if random.random() < 0.1:
        del members[name]
        what = "left out"
    else:
        mutate = mutated_text if name in text_names else mutated_bytes
        members[name], what = mutate(members[name], random)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, contents in members.items():
            archive.writestr(each, contents)
    return packed.getvalue(), f"{name}: {what}"
