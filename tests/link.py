"""A cable between two network namespaces, one TUN device in each, that delivers every packet late.

    python tests/link.py PID_OF_THE_FIRST PID_OF_THE_SECOND SECONDS

The namespaces are those of the two processes; their devices are cable0 with the addresses of ADDRESSES. It prints
"ready" and runs until it is killed. While it is stopped (SIGSTOP) nothing gets through, as in a cut cable. This is
`tc netem delay` for kernels that lack it.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

ADDRESSES = ("10.83.0.1", "10.83.0.2")
DEVICE = "cable0"
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000  # packets alone, without a header of their own
MTU = 60000  # long packets, since each one costs this process the same


def open_device(pid: int, address: str) -> int:
    """Make the device in the network namespace of the process `pid`, which this process enters; a file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for words in (f"addr add {address}/24 dev {DEVICE}", f"link set {DEVICE} mtu {MTU} up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)
    return device


def carry(devices: list[int], delay_s: float) -> None:
    """Hand each packet of a device to the other one, `delay_s` later; forever."""
    other = dict(zip(devices, reversed(devices), strict=True))
    under_way = collections.deque()  # (when it arrives, device, packet)
    while True:
        wait_s = max(under_way[0][0] - time.monotonic(), 0) if under_way else None
        for device in select.select(devices, [], [], wait_s)[0]:
            packet = os.read(device, MTU)
            under_way.append((time.monotonic() + delay_s, other[device], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, device, packet = under_way.popleft()
            os.write(device, packet)


def main(argv: list[str]) -> None:
    with contextlib.suppress(PermissionError):  # on a busy machine the scheduler would add to the delay
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    devices = [open_device(int(pid), address) for pid, address in zip(argv[:2], ADDRESSES, strict=True)]
    print("ready", flush=True)
    carry(devices, float(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
