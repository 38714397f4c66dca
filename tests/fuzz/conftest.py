from tests.server.conftest import docs_dir, start_server, tiny_model  # noqa: F401  (fixtures)
