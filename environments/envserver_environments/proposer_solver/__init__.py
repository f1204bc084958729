"""One agent makes problems that are neither too easy nor too hard for the other."""
