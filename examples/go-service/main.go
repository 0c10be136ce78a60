// A service in Go, and its load generator. `service ADDRESS` serves; `service ADDRESS REQUESTS`
// sends that many requests on four connections.
package main

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"sync"
)

const connections = 4

func main() {
	address := os.Args[1]
	if len(os.Args) == 2 {
		serve(address)
	}
	requests, err := strconv.Atoi(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	load(address, requests)
}

func serve(address string) {
	http.HandleFunc("/", func(answer http.ResponseWriter, request *http.Request) {
		fmt.Fprintf(answer, "hello, %s\n", request.URL.Path)
	})
	log.Fatal(http.ListenAndServe(address, nil))
}

func load(address string, requests int) {
	var all sync.WaitGroup
	all.Add(connections)
	for count := 0; count < connections; count++ {
		go func() {
			defer all.Done()
			client := http.Client{Transport: &http.Transport{}}
			for asked := 0; asked < requests/connections; asked++ {
				ask(&client, "http://"+address+"/go")
			}
		}()
	}
	all.Wait()
	fmt.Printf("%d answers\n", requests/connections*connections)
}

func ask(client *http.Client, url string) {
	answer, err := client.Get(url)
	if err != nil {
		log.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || string(text) != "hello, /go\n" {
		log.Fatalf("%q, %v", text, err)
	}
}
