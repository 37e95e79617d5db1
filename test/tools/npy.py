"""A .npy file of fp32 without NumPy, and what log-probabilities it says. Shared by tools of the shell tests."""
import array, ast, math, struct


def load(path):
    """shape, and the values in one array."""
    data = open(path, "rb").read()
    assert data[:8] == b"\x93NUMPY\x01\x00", "not a .npy file of version 1"
    size = struct.unpack("<H", data[8:10])[0]
    assert (10 + size) % 64 == 0 and data[9 + size : 10 + size] == b"\n", "a header that is not padded as the format says"
    head = ast.literal_eval(data[10 : 10 + size].decode("latin-1"))
    assert head["descr"] == "<f4" and head["fortran_order"] is False, head
    values = array.array("f", data[10 + size :])
    assert len(values) == math.prod(head["shape"]), (len(values), head["shape"])
    return head["shape"], values


def log_prob(values, vocab, row, token):
    """Of a token, by the logits of a row; and whether none is larger than the token's."""
    logits = values[row * vocab : (row + 1) * vocab]
    top = max(logits)
    return logits[token] - top - math.log(math.fsum(math.exp(x - top) for x in logits)), logits[token] == top
