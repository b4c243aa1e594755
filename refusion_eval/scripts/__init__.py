"""What eval.sh and train.sh do beyond making the environment.

Both scripts check their options and print a dry run before any package is installed, so the modules here import nothing
but the standard library and modules of the package that do the same.
"""
