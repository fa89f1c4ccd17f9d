"""The program that cProfile, austin 3.7 and line_profiler 5.1 recorded the profiles beside it of."""

import json


def decode(n):
    total = 0
    for k in range(n):
        total += k * k % 7
    return total


def parse(text):
    return json.loads(text)


def fact(n):
    return 1 if n < 2 else n * fact(n - 1)


def main():
    for _ in range(300):
        decode(2000)
        parse("[1, 2, 3]")
        fact(5)


if __name__ == "__main__":
    main()
