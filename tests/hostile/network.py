# ruff: noqa: E501 - whole programs in strings
"""Programs that want out: the host listens on TCP, UDP and unix sockets for the mark."""

from __future__ import annotations

from .program import Hostile


def unheard(name: str, source: str) -> Hostile:
    return Hostile(name=name, must="the host hears nothing", source=source)


PROGRAMS = [
    unheard(
        "TCP to the host",
        """\
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "0.0.0.0"),
                        (socket.AF_INET6, "::ffff:127.0.0.1"), (socket.AF_INET6, "::")):
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(0.5)
            connection.connect((address, PORT))
            connection.sendall(MARK.encode())
            got(address)
    except OSError:
        pass
""",
    ),
    unheard(
        "UDP to the host",
        """\
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    try:
        socket.socket(family, socket.SOCK_DGRAM).sendto(MARK.encode(), (address, PORT))
    except OSError:
        pass
""",
    ),
    unheard(
        "TCP with its first data in the greeting",
        """\
try:
    socket.socket().sendto(MARK.encode(), 0x20000000, ("127.0.0.1", PORT))
except OSError:
    pass
""",
    ),
    Hostile(
        name="TCP by shell",
        must="the host hears nothing",
        language="shell",
        source="""\
bash -c "exec 3<>/dev/tcp/127.0.0.1/$PORT && echo $MARK >&3" 2>/dev/null
curl -sm 1 http://127.0.0.1:$PORT/$MARK 2>/dev/null
true
""",
    ),
    unheard(
        "TCP with other words for it",
        """\
for protocol in (6, 132, 262, 33, 136):  # TCP, SCTP, MPTCP, DCCP, UDP-Lite
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM, 6):
        try:
            connection = socket.socket(socket.AF_INET, kind, protocol)
            connection.settimeout(0.5)
            connection.connect(("127.0.0.1", PORT))
            connection.send(MARK.encode())
        except OSError:
            pass
""",
    ),
    unheard(
        "an abstract unix socket",
        """\
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    try:
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.connect("\\0" + ABSTRACT)
        connection.send(MARK.encode())
        got("connected")
    except OSError:
        pass
""",
    ),
    unheard(
        "a unix socket by its path",
        """\
for path in (SOCKET, "/proc/1/root" + SOCKET, f"/proc/{SERVER}/root" + SOCKET):
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.send(MARK.encode())
        got("connected")
    except OSError:
        pass
""",
    ),
    unheard(
        "the sandboxes' own server",
        """\
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
    try:
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.connect(SERVICE)
        got("connected")
    except OSError:
        pass
""",
    ),
    unheard(
        "sockets of the system",
        """\
for top in ("/run", "/var/run", "/dev"):
    for folder, folders, files in os.walk(top):
        for name in files:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                try:
                    connection = socket.socket(socket.AF_UNIX, kind)
                    connection.connect(f"{folder}/{name}")
                    got(f"{folder}/{name}")
                except OSError:
                    pass
""",
    ),
    unheard(
        "sockets of the machine below",
        """\
try:
    socket.socket(40, socket.SOCK_STREAM)
    got("a socket")
except OSError:
    pass
""",
    ),
    unheard(
        "raw packets",
        """\
for family, kind, protocol in ((socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_INET, socket.SOCK_RAW, 255),
                               (17, socket.SOCK_RAW, 0x0300), (17, socket.SOCK_DGRAM, 0x0300)):
    try:
        socket.socket(family, kind, protocol)
        got(f"{family} {kind} {protocol}")
    except OSError:
        pass
""",
    ),
    Hostile(
        name="a server that the host would reach",
        must="nobody outside can connect",
        source="""\
try:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", FREE_PORT))
    server.listen()
    server.settimeout(1)
    server.accept()[0].send(MARK.encode())
    got("a guest")
except OSError:
    pass
""",
    ),
    unheard(
        "a way to the world",
        """\
for address in ("192.0.2.1", "198.51.100.1", "169.254.169.254"):
    try:  # asks the kernel for a way; no packet is sent
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect((address, 9))
        got(address)
    except OSError:
        pass
""",
    ),
    unheard(
        "other ways of the network",
        """\
for name in os.listdir("/sys/class/net") if os.path.isdir("/sys/class/net") else ():
    print(name)
try:
    names = [name for _, name in socket.if_nameindex()]
    if set(names) - {"lo", "tunl0", "gre0", "sit0", "ip6tnl0", "ip_vti0", "ip6_vti0", "erspan0", "gretap0", "ip6gre0"}:
        got(str(names))
except OSError:
    pass
for line in (open("/proc/net/tcp").readlines()[1:] if os.path.exists("/proc/net/tcp") else ()):
    if line.split()[1].endswith(f":{PORT:04X}"):
        got("sees the host's connections")
""",
    ),
]
