"""What a maintainer runs: build, publish, a local Hub server. Nothing that ships imports from here."""
