from matmuls_cli import main

main()
