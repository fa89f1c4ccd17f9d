"""The program that cProfile, austin 3.7 and line_profiler 5.1 recorded the profiles beside it of."""

import json


def decode(n: int) -> int:
    total = 0
    for k in range(n):
        total += k * k % 7
    return total


def parse(text: str) -> object:
    return json.loads(text)


def fact(n: int) -> int:
    return 1 if n < 2 else n * fact(n - 1)


def main() -> None:
    for _ in range(300):
        decode(2000)
        parse("[1, 2, 3]")
        fact(5)


if __name__ == "__main__":
    main()
