"""List the devices that a URL can name: ``python -m laneway.adapters``."""

from laneway.adapters.discover import list_devices


def main() -> None:
    """Print one line for each name; a broken one says why."""
    for listed in list_devices():
        state = listed.error or "ok"
        print(f"{listed.name}:  {listed.target}  ({listed.distribution})  {state}")


if __name__ == "__main__":
    main()
