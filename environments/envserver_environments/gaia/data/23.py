def main():
    load()


def load():
    clean()


def clean():
    merge()
    weigh()


def merge():
    return 1


def weigh():
    rank()


def rank():
    return 1


def prune():
    render()


def render():
    prune()


def emit():
    return 1


def retry():
    audit()


def audit():
    emit()


main()
