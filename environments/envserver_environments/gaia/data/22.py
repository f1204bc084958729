"""A machine of one's own."""


def turn(state):
    a, b, c = state
    if c % 3 == 0:
        return b, (a * 31 + c) % 1009, c + 1
    if a > b:
        return (a - b) % 1009, b, c + 1
    return a, (b ^ c) % 1009, c + 1


def main():
    state = (17, 404, 0)
    for _ in range(5000):
        state = turn(state)
    print("state:", *state[:2])


if __name__ == "__main__":
    main()
