#!/usr/bin/env python3
"""What somebody on the network may try with a run, for test/test_network.sh. A model of the greeting (boot/greet.h) of its
own, with hashlib's BLAKE2b.

    attack.py spray KIND SECONDS              every port that begins to listen: bare, zeros, garbage, half, slow, call
    attack.py knock PORT SECRET JOB RANK ROLE  one greeting; prints what was heard
    attack.py replay PORT SECRET JOB           a right greeting's last word again, on another connection
    attack.py relay PORT TO                    passes on what comes at PORT to port TO
    attack.py impostor PORT                    answers calls without the secret
    attack.py versions PORT                    calls as another version of the program would, again and again
    attack.py flood PORT COUNT                 so many connections at once, half of them with garbage
"""
import hashlib
import os
import select
import signal
import socket
import struct
import sys
import time

MAGIC, VERSION = b"MGTRAIN1", 5
CALLS_A_PORT = 40
CALL = 48
ANSWER = CALL + 32
WELCOME = 8 + 4 + 4 + 64 + 512 + 32


def key_of(secret, job):
    short = hashlib.blake2b(secret.encode(), digest_size=32).digest()
    return hashlib.blake2b(job.encode(), digest_size=32, key=short).digest()


def proof(key, what, port, numbers, said=b""):
    return hashlib.blake2b(struct.pack("<III", what, VERSION, port) + numbers + said, digest_size=32, key=key).digest()


def call_with(number, version=VERSION):
    return MAGIC + struct.pack("<II", version, 0) + number


def receive(s, n):
    """n bytes, or what came before the end."""
    got = b""
    while len(got) < n:
        more = s.recv(n - len(got))
        if not more:
            break
        got += more
    return got


def connect(port):
    return socket.create_connection(("127.0.0.1", port), 5)


def greet(s, port, key, rank, role, process=b"\x01" * 8):
    """Calls and introduces itself: the hello with its proof, and whether the answer was right."""
    number = os.urandom(32)
    s.sendall(call_with(number))
    answer = receive(s, ANSWER)
    numbers = number + answer[16:CALL]
    right = answer[CALL:] == proof(key, 1, port, numbers)
    hello = process + struct.pack("<IIIIII", role, rank, 0, os.getpid(), 0, 0) + b"attacker\x1b[2J".ljust(64, b"\0")
    word = hello + proof(key, 2, port, numbers, hello)
    s.sendall(word)
    return word, right, numbers


def knock(port, secret, job, rank, role):
    key, s = key_of(secret, job), connect(port)
    word, right, numbers = greet(s, port, key, rank, role)
    heard = receive(s, WELCOME)
    if len(heard) < WELCOME:
        return print("right" if right else "wrong", "answer, then", len(heard), "bytes and a close")
    hello, welcome = word[:-32], heard[:-32]
    proven = heard[-32:] == proof(key, 3, port, numbers, hello + welcome)
    text = welcome[80:].split(b"\0")[0].decode()
    print("right answer," if right else "wrong answer,", "proven" if proven else "unproven",
          "welcome", struct.unpack("<I", welcome[8:12])[0], text)


def replay(port, secret, job):
    key, first, second = key_of(secret, job), connect(port), connect(port)
    word, _, _ = greet(first, port, key, 1, 0)
    heard = len(receive(first, WELCOME))
    second.sendall(call_with(os.urandom(32)))
    receive(second, ANSWER)
    second.sendall(word)
    print("first", heard, "second", len(receive(second, WELCOME)))


def listeners():
    ports = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in open(path).readlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                ports.add(int(words[1].split(":")[1], 16))
    return ports


def spray(kind, seconds):
    known, open_ones, end, touched = listeners(), [], time.time() + float(seconds), {}
    print("ready", flush=True)
    said = {"bare": b"", "zeros": bytes(4096), "garbage": os.urandom(4096), "half": MAGIC, "slow": b"M",
            "call": call_with(os.urandom(32))}[kind]
    while time.time() < end:
        for port in listeners() - known:
            if touched.get(port, 0) == CALLS_A_PORT:
                continue
            s = socket.socket()
            s.setblocking(False)
            try:
                s.connect_ex(("127.0.0.1", port))
                touched[port] = touched.get(port, 0) + 1
                if touched[port] == CALLS_A_PORT:
                    print("port", port, flush=True)
                s.sendall(said)
            except OSError:
                pass
            open_ones.append(s)


def relay(port, to):
    server = socket.create_server(("127.0.0.1", port), backlog=64)
    print("ready", flush=True)
    peer, heard = {}, {}
    while True:
        for s in select.select([server] + list(peer), [], [])[0]:
            if s is server:
                a, _ = server.accept()
                try:
                    b = connect(to)
                except OSError:
                    a.close()
                    continue
                peer[a], peer[b] = b, a
                heard[a] = 0
                continue
            data = b""
            try:
                data = s.recv(65536)
                peer[s].sendall(data)
            except OSError:
                pass
            if s in heard:
                heard[s] += len(data)
                if data:
                    print("passed", heard[s], flush=True)
            if not data:
                other = peer.pop(s)
                peer.pop(other)
                s.close()
                other.close()


def impostor(port):
    server = socket.create_server(("127.0.0.1", port), backlog=64)
    print("ready", flush=True)
    while True:
        s, _ = server.accept()
        s.settimeout(1)
        try:
            if len(receive(s, CALL)) == CALL:
                s.sendall(call_with(os.urandom(32)) + os.urandom(32))
                print("heard", len(receive(s, 1)), "bytes more", flush=True)
        except OSError:
            pass
        s.close()


def versions(port):
    held = []
    print("ready", flush=True)
    while True:
        try:
            s = connect(port)
            s.sendall(call_with(os.urandom(32), VERSION + 1))
            held.append(s)
        except OSError:
            pass
        if len(held) > 64:
            held.pop(0).close()
        time.sleep(0.01)


def flood(port, count):
    held = []
    for i in range(int(count)):
        try:
            s = connect(port)
            if i % 2:
                s.sendall(os.urandom(2000))
            held.append(s)
        except OSError:
            pass
    print("held", len(held))
    time.sleep(1)


if __name__ == "__main__":
    command, words = sys.argv[1], sys.argv[2:]
    if command == "spray":
        spray(*words)
    elif command == "knock":
        knock(int(words[0]), words[1], words[2], int(words[3]), int(words[4]))
    elif command == "replay":
        replay(int(words[0]), words[1], words[2])
    elif command == "relay":
        relay(int(words[0]), int(words[1]))
    elif command == "impostor":
        impostor(int(words[0]))
    elif command == "versions":
        versions(int(words[0]))
    else:
        flood(int(words[0]), words[1])
