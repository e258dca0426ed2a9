"""``python -m rco`` is the ``rco`` command; torchrun starts ranks this way."""

from rco.cli import entry_point

if __name__ == "__main__":
    entry_point()
