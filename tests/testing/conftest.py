"""The plugin that tests pytest plugins, for the tests that `layer_tests` makes."""

pytest_plugins = ["pytester"]
