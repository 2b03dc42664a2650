"""``conserve bench`` (see README.md), and measurements of ConServe that are run by themselves."""
