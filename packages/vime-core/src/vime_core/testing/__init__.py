"""For tests of structures, contracts and plugins: random models of realistic scale, prompts, configurations.

Needs ``vime-core[data,torch]``; nothing of vime itself imports it when it runs.
"""
